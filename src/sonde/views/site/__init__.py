"""A run as a folder of plain files that shows the viewer without Sonde, from a file server or from disk."""

from sonde.views.site.write import Limits, Written, write_site

__all__ = ["Limits", "Written", "write_site"]
