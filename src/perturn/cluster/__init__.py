"""Environments and replicas of the policy on the nodes of a Ray cluster; the driver and its files stay on one machine.

If a node dies, its environments and replicas are started again elsewhere. The driver knows each environment's task, and
sends the whole conversation with each prompt. So only unfinished episodes of the lost node are played again.
"""

from perturn.cluster.node_worlds import ClusterWorlds, cluster_worlds
from perturn.cluster.replica_engine import Replicas

__all__ = ["ClusterWorlds", "Replicas", "cluster_worlds"]
