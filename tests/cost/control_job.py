"""Count the messages of start-up, agreement and checkpoints on this rank: JOB FOLDER."""

import ctypes
import json
import sys
from pathlib import Path

import torch

import hpctrain as hvd
from hpctrain.checkpoint import Manager
from hpctrain.comm.mpi_start import MPI
from hpctrain.runtime.world import current

SIZE_CLASS = 2  # MPI_T_PVAR_CLASS_SIZE of Open MPI


class MessageCounter:
    """Messages that this rank has sent, counted by Open MPI's component ``monitoring``."""

    def __init__(self):
        maps = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[-1] for line in maps if "/libmpi.so" in line)
        self.mpi, number = ctypes.CDLL(path), ctypes.c_int()
        self.call("init_thread", MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        name = b"pml_monitoring_messages_count"
        self.call("pvar_get_index", name, SIZE_CLASS, ctypes.byref(number))
        self.session, self.variable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("pvar_session_create", ctypes.byref(self.session))
        world, length = ctypes.c_void_p(MPI._handleof(MPI.COMM_WORLD)), ctypes.c_int()
        where = ctypes.byref(world), ctypes.byref(self.variable), ctypes.byref(length)
        self.call("pvar_handle_alloc", self.session, number, *where)
        self.call("pvar_start", self.session, self.variable)
        self.of_peers = (ctypes.c_size_t * length.value)()

    def call(self, name, *arguments):
        assert getattr(self.mpi, f"MPI_T_{name}")(*arguments) == 0, name

    def sent_by(self, action):
        """Return the messages that this rank sends during ``action``."""
        before = self.read()
        action()
        return self.read() - before

    def read(self):
        self.call("pvar_read", self.session, self.variable, self.of_peers)
        return sum(self.of_peers)


def main(folder):
    counter = MessageCounter()
    found = {"start": counter.sent_by(hvd.init)}
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3) * hvd.rank()).sum().backward()
        optimizer.step()

    step()
    found["step"] = counter.sent_by(step)
    found["stop check"] = counter.sent_by(hvd.should_stop)
    manager = Manager(folder / "checkpoints", current().comm)
    state = {"model": model.state_dict()}
    found["save"] = counter.sent_by(lambda: manager.save(state, 1, wait=True))
    found["load"] = counter.sent_by(manager.load_latest)
    manager.close()
    (folder / f"messages-{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
