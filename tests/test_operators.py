"""A process that is given graphs knows all operators that they may call."""

import json
import subprocess
import sys

SCRIPT = """
import json, torch
names = lambda: sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fxshard::"))
import fxshard.operators
first = names()
import fxshard.api, fxshard.planning, fxshard.optim.muon
print(json.dumps([first, names()]))
"""


def test_no_operator_is_missing() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found, all_of_them = json.loads(ran.stdout)
    assert len(found) > 10 and found == all_of_them
