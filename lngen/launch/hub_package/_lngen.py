"""What a hub package takes from lngen. In the package this is a folder, with copies of these modules of lngen in it."""

from ...dtypes import FLOATS
from ...errors import LngenError, short
from ..pack import Pack, load
from ..pack_norms import PackNorm, PackSaved

__all__ = ["FLOATS", "LngenError", "Pack", "PackNorm", "PackSaved", "load", "short"]
