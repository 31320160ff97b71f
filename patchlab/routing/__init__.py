"""Expert routing of mixture-of-experts models: record it, replay it, look at it, hand it over."""

from __future__ import annotations

from patchlab._upstream import string_keyed_recorders
from patchlab.routing.record import record_routing
from patchlab.routing.replay import replay_routing
from patchlab.routing.sites import RouterSite, find_routers
from patchlab.routing.trace import Router, RoutingTrace, TokenBlock

__all__ = [
    "Router",
    "RouterSite",
    "RoutingTrace",
    "TokenBlock",
    "find_routers",
    "record_routing",
    "replay_routing",
    "string_keyed_recorders",
]
