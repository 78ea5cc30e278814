"""Commands in several processes, started and ended as a group, so that nothing a launcher left behind lives on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
PATIENCE = 240.0  # seconds, for a machine that has much else to do; then it counts as a hang


class Group:
    """What it says goes to files, where it can be read while the processes run and when one of them hangs."""

    def __init__(self, command: tuple[str, ...], folder: Path) -> None:
        self._said = [folder / f".said-{time.monotonic_ns()}.{end}" for end in ("out", "err")]
        with self._said[0].open("w") as out, self._said[1].open("w") as err:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._said[0].read_text()

    @property
    def err(self) -> str:
        return self._said[1].read_text()

    def wait_for(self, text: str) -> None:
        """Until it has said so."""
        end = time.monotonic() + PATIENCE
        while text not in self.out:
            assert self.process.poll() is None, f"it ended without {text!r}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"it did not come to {text!r}:\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """To every process of the group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def ended(self) -> int:
        """The launcher's exit code, once all processes are gone."""
        code = self.process.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while self._lives():
            assert time.monotonic() < end, f"a process outlived its launcher:\n{self.out}\n{self.err}"
            time.sleep(0.02)
        return code

    def _lives(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def launched(*command: str, folder: Path) -> Iterator[Group]:
    group = Group(command, folder)
    try:
        yield group
    finally:
        if group._lives():
            group.signal(signal.SIGKILL)
        group.process.wait()
