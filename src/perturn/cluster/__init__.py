"""Worlds and replicas of the policy on the nodes of a Ray cluster; the driver and its files stay where they are.

Everything on a node can be lost with it and made again: a world, whose task the driver knows, and a replica, which gets
a conversation's whole history with each prompt. So a node that dies costs its unfinished episodes a new start.
"""

from perturn.cluster.node_worlds import ClusterWorlds, cluster_worlds
from perturn.cluster.replica_engine import Replicas

__all__ = ["ClusterWorlds", "Replicas", "cluster_worlds"]
