"""Steps of different kinds in turn give what one process gives."""

from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.gradients.training import (
    MANY,
    ONE_NODE,
    OVERLAPS,
    assert_close,
    backward,
    distributed,
    global_batch,
    gradients,
    largest_difference,
    make_model,
    part_of,
    sgd,
)

pytestmark = ONE_NODE
KINDS = ("plain", "reentrant", "reentrant", "plain", "in part", "plain", "reentrant", "in part")


def forward(model: nn.Module, images, kind: str):
    """Run the model; ``reentrant`` runs backward inside backward for all or the middle of it."""
    if kind == "plain":
        return model(images)
    if kind == "reentrant":
        return checkpoint(model, images.requires_grad_(), use_reentrant=True)
    return model[3:](checkpoint(model[1:3], model[0](images), use_reentrant=True))


@MANY
@OVERLAPS
def test_checkpointed_and_plain_steps_in_turn_train_as_one_process(hvd):
    model, alone = make_model(), make_model()
    optimizer, plain = distributed(hvd, model), sgd(alone)
    for step, kind in enumerate(KINDS):
        images, labels = global_batch(step)
        plain.zero_grad()
        cross_entropy(alone(images), labels).backward()
        plain.step()
        images, labels = part_of((images, labels), hvd.rank(), hvd.size())
        optimizer.zero_grad()
        cross_entropy(forward(model, images.clone(), kind), labels).backward()
        assert_close(gradients(model), gradients(alone))  # not only after step()
        optimizer.step()
    assert largest_difference(model, alone) < 1e-12


@MANY
@OVERLAPS
def test_steps_that_skip_and_steps_that_do_not_take_turns(hvd):
    model, alone = make_model(), make_model()
    optimizer, plain = distributed(hvd, model), sgd(alone)
    for step, skips in enumerate((False, True, True, False, True, False)):
        images, labels = global_batch(step)
        plain.zero_grad()
        cross_entropy(alone(images), labels).backward()
        plain.step()
        optimizer.zero_grad()
        backward(hvd, model, step)
        if skips:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    assert largest_difference(model, alone) < 1e-12
