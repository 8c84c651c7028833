"""Adapters that let a host library (an engine or a kernel library) run on the kernels of `gdn`: one module a host.

`gdn.integrations.X.enable() -> Handle` replaces functions of the installed host X by those of this project, where the host's
signatures are the recorded ones. A call that this project does not serve runs the host's own code with its arguments untouched.
Importing an adapter imports neither its host nor a DSL.

- `_hosts`: what each adapter touches of its host; `recorded/<host>.json`: its signatures, written by
  `python -m tests.integrations.record HOST`
- `_signatures`, `_records`: read signatures of objects and of sources; compare them with the recorded ones
- `_calls`: refusals that all adapters share, and the counters of a replaced point
- `_points`, `_handle`: replace attributes and put them back; `Handle` and its report
- `installed`: the hosts of this machine, without importing them (`gdn doctor`)
"""

from gdn.integrations._calls import Refused as Refused
from gdn.integrations._handle import Handle as Handle
from gdn.integrations._handle import PointReport as PointReport
from gdn.integrations._handle import Report as Report
