# Types of the extension module; each csrc/bindings/bind_<room>.cpp has its stub beside this file.
from . import base as base
from . import compress as compress
from . import kernels as kernels
from . import keys as keys
from . import ops as ops
from . import pages as pages
from . import prefix as prefix
from . import probe as probe
from . import sched as sched
from . import stream as stream
from . import transport as transport
from . import wire as wire

__version__: str
__build__: str
