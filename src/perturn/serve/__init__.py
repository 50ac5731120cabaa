"""Serve a policy through the protocols of agent programs. Each session is recorded as a trajectory."""

from perturn.serve.endpoint import Endpoint as Endpoint
from perturn.serve.settings import ServeSettings as ServeSettings
