"""What a hub package takes from lngen. In the package this is a folder, with copies of these modules of lngen in it."""

from ...dtypes import FLOATS
from ...errors import LngenError, short
from ..array_norm import Saved
from ..pack import Pack, load
from ..pack_norms import PackNorm

__all__ = ["FLOATS", "LngenError", "Pack", "PackNorm", "Saved", "load", "short"]
