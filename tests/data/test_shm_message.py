"""What workers hand over lies in shared memory, which is used again."""

import gc
import os
import pickle

import torch

from hpctrain.data.workers.shm_message import Inbox, Outbox


def test_segments_are_used_again_and_too_many_are_given_back():
    outbox, inbox = Outbox(), Inbox()

    def send(value):
        offered, surplus = inbox.offer()
        outbox.forget(surplus)
        parcel, descriptor = outbox.pack(value, offered)
        found = inbox.unpack(pickle.loads(pickle.dumps(parcel)), offered, descriptor)
        if descriptor is not None:
            os.close(descriptor)
        return found

    def same_segments():
        return outbox._segments.keys() == inbox._segments.keys()

    for size in (10, 1000, 5000, 5000, 0, 10):
        assert (send([torch.full((size,), 7)])[0] == 7).all()
    gc.collect()
    assert len(outbox._segments) == 1
    kept = [send(torch.full((100,), n)) for n in range(20)]
    assert len(outbox._segments) == 20
    assert [batch[0].item() for batch in kept] == list(range(20))
    view = kept[3][5:]
    del kept
    assert send("no tensor") == "no tensor"
    for _ in range(3):
        send(torch.ones(3))
    assert len(outbox._segments) <= 6
    assert same_segments()
    assert (view == 3).all()
