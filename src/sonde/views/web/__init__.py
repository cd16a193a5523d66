"""The viewer: one web page for runs. A server over the store, and a front end without a build step. No torch."""

from sonde.views.web.app import make_app
from sonde.views.web.serve import Place, serve

__all__ = ["Place", "make_app", "serve"]
