"""A policy behind the protocols that agent programs speak; each session is recorded as a trajectory."""

from perturn.serve.endpoint import Endpoint as Endpoint
from perturn.serve.settings import ServeSettings as ServeSettings
