"""Programs of tests, forked from a process that has imported torch, which takes seconds.

Nothing of faststep is imported there, so that a program can change torch or the environment first.
The compiler of torch is: torch imports it in an optimizer's first step. What is there by then is
frozen, or a program would look through all of it when it ends, which takes most of a second.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

SERVER = r"""
import gc, json, os, sys, torch, torch._dynamo

gc.collect()
gc.freeze()

for line in sys.stdin:
    code, arguments, environment, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        for fd, name in ((0, os.devnull), (1, folder + "/out"), (2, folder + "/err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), fd)
        os.environ.update(environment)
        sys.argv[1:] = arguments
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


RANKS = """
import os, signal, torch
pids = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    pids.append(os.fork())
    if not pids[-1]:
        break
else:
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGTERM)
    raise SystemExit(failed)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % int(os.environ["LOCAL_WORLD_SIZE"])))
torch.set_num_threads(1)
"""
MAIN = """
import os, sys
os.chdir(sys.argv.pop(1))
from faststep.cli import main
raise SystemExit(main())
"""
# As `python script.py words`.
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Programs:
    """Runs programs one after the other.

    Args:
        environment: what differs from this process's when torch is imported.
    """

    def __init__(self, **environment: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def run(
        self, code: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """As `python -c code *arguments`, with an environment that is set after torch's import."""
        sent, answers = self._server.stdin, self._server.stdout
        assert sent
        assert answers
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([code, arguments, environment, folder]), file=sent, flush=True)
            answer = answers.readline()
            assert answer, "the process that has imported torch is gone"
            out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(code, int(answer), out, err)

    def faststep(
        self, folder: Path, *words: object, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """As `python -m faststep *words` in a folder."""
        return self.run(MAIN, str(folder), *map(str, words), **environment)

    def ranks(
        self, count: int, code: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """The same on each of so many ranks, with what torchrun gives them, and its store."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torchruns = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return self.run(RANKS + code, *arguments, **{**torchruns, **environment})

    def close(self) -> None:
        self._server.communicate()
