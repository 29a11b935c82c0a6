# Types of the extension module; each csrc/bindings/bind_<room>.cpp has its stub beside this file.
from . import base as base
from . import keys as keys
from . import kernels as kernels
from . import ops as ops
from . import pages as pages
from . import probe as probe

__version__: str
