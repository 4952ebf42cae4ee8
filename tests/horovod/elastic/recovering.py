"""A training under ``hpctrain launch --recover`` whose ranks die; survivors write a result file.

    hpctrain launch -n 4 --recover python recovering.py FOLDER KILLS

``KILLS`` is a JSON list of one of these triples:

- rank of the launch, step, and milliseconds from that step to the kill;
- rank, ``"remaking"``, and the number of the call, counted from the start of ``remake``, in which
  the rank is killed;
- rank of a spare, ``"waiting"``, and the number of the call, counted from the start of
  ``Spares.wait``, in which the spare is stopped.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import hpctrain as hvd
from hpctrain import elastic
from hpctrain.checkpoint import save
from hpctrain.comm.spares import Spares
from hpctrain.comm.survivors import remake

NUM_SAMPLES, EPOCHS, BATCH = 96, 2, 4


CALLS = {"remaking": (remake, signal.SIGKILL), "waiting": (Spares.wait, signal.SIGSTOP)}
"""By name: the function from which calls are counted, and the signal that is sent."""


class Victim:
    """Kill or stop this process at the time given in ``KILLS``."""

    def __init__(self, kills, rank):
        self.kills = {r: (step, ms) for r, step, ms in kills}
        self.mine = self.kills.get(rank)
        if self.mine is not None and self.mine[0] in CALLS:
            where, self.calls_left = self.mine
            self.mine, self.is_there = None, False
            function, self.signal = CALLS[where]
            self.code = function.__code__
            sys.setprofile(self._watch)

    def _watch(self, frame, event, _):
        self.is_there = self.is_there or frame.f_code is self.code
        if self.is_there and "call" in event:
            self.calls_left -= 1
            if not self.calls_left:
                os.kill(os.getpid(), self.signal)

    def at(self, step):
        """Kill this process ``ms`` milliseconds after its step starts."""
        if self.mine is None or step < self.mine[0]:
            return
        _, ms = self.mine
        self.mine = None
        if not ms:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=self._die, args=(ms / 1e3,), daemon=True).start()

    @staticmethod
    def _die(seconds):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Train, and write the result of this rank to a file."""
    folder, kills = Path(sys.argv[1]), json.loads(sys.argv[2])
    first_rank = int(os.environ["OMPI_COMM_WORLD_RANK"])  # spares have a rank here too
    victim = Victim(kills, first_rank)
    hvd.init()
    torch.manual_seed(first_rank)
    source = torch.Generator().manual_seed(1)
    data = torch.randn(NUM_SAMPLES, 6, generator=source)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = elastic.ElasticSampler(range(NUM_SAMPLES), seed=5)
    visits = torch.zeros(EPOCHS, NUM_SAMPLES)
    state = elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, step=0, visits=visits, sizes=[]
    )

    @elastic.run
    def train(state):
        state.sizes = [*state.sizes, hvd.size()]
        mine = torch.zeros(EPOCHS, NUM_SAMPLES)

        def commit():
            state.visits = state.visits + hvd.allreduce(mine, op=hvd.Sum, name="visits")
            mine.zero_()
            state.commit()
            saved = {"model": state.model.state_dict()}
            where = folder / "saved" / f"{state.step}-{hvd.size()}"
            save(where, saved, hvd.current().comm, step=state.step)

        while state.epoch < EPOCHS:
            order = list(state.sampler)
            for start in range(0, len(order), BATCH):
                victim.at(state.step)
                batch = order[start : start + BATCH]
                state.optimizer.zero_grad()
                state.model(data[batch]).square().mean().backward()
                state.optimizer.step()
                mine[state.epoch, batch] += 1
                state.sampler.record_batch(start // BATCH, len(batch))
                state.step += 1
                if state.step % 3 == 0:
                    commit()
            commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
        return hvd.size()

    size = train(state)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    end = {
        "size": size,
        "sizes": state.sizes,
        "visits": state.visits.tolist(),
        "weights": weights.tolist(),
    }
    (folder / f"{first_rank}.json").write_text(json.dumps(end))
    hvd.shutdown()


if __name__ == "__main__":
    main()
