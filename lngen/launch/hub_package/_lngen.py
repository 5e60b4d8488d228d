"""What a hub package takes from lngen. In the package this is a folder, with copies of these modules of lngen in it."""

from ...dtypes import FLOATS
from ...errors import ArrayError, LngenError, short
from ..array_call import ArrayCall
from ..direct import TO_TORCH, Direct
from ..pack import Pack, load
from ..pack_norms import PackCall, PackNorm
from ..signature import NO_VALUES, Values

__all__ = [
    "FLOATS", "NO_VALUES", "TO_TORCH", "ArrayCall", "ArrayError", "Direct", "LngenError", "Pack", "PackCall",
    "PackNorm", "Values", "load", "short",
]  # fmt: skip
