"""Serve a policy to agent programs through the APIs of model providers, and record each session as a trajectory."""

from perturn.serve.endpoint import Endpoint as Endpoint
from perturn.serve.endpoint import check_address as check_address
from perturn.serve.settings import ServeSettings as ServeSettings
