"""Predict the result of a training script with replicas in one process and plain torch."""

from contextlib import nullcontext
from types import SimpleNamespace

from tests.gradients.program_wraps import Local, Wrap, dense

LOOSE = 0.1
"""Distance from the oracle that is allowed where parameters are frozen in an outer round."""


def kept(grad):
    return None if grad is None else (place_of(grad), grad.detach().clone())


def place_of(grad):
    return grad._version, 0 if grad.is_sparse else grad.data_ptr()


class RefusedToOneError(Exception):
    """Raised if torch raises for a statement on only some replicas; the script ends before it."""


class Oracle:
    """Run all replicas of a script, statement by statement.

    A statement has one of these meanings: ``each`` runs the line on every replica. ``backward``
    runs the line and then reduces the gradients. ``partial`` runs the line without a reduction,
    because a rank has skipped backward. ``step`` reduces and then steps. ``raw`` steps without a
    reduction. ``sync`` only reduces.
    """

    def __init__(self, prelude, size, nodes):
        self.size, self.nodes = size, nodes
        self.may_refuse = ""  # reason why an error on all ranks is also correct
        self.unclear = ""  # reason why several values are correct, if equal on all ranks
        self.atol = 0.0
        self.makers, self.made = [[] for _ in range(size)], []
        self.shared = set()
        """Parameters of replica 0 whose gradients were reduced, and are alike since."""
        self.replaced = set()  # parameters whose gradient is now another tensor
        self.base = {}  # reduced values in gradients to which replicas have added
        self.names = [{"hvd": Stub(self, rank)} for rank in range(size)]
        for names in self.names:
            exec(prelude, names)

    def run(self, statement):
        if statement.meaning:
            for line, kind in statement.meaning:
                self._run(line, kind, statement.target)
        else:
            self._run(statement.line, statement.kind, statement.target)

    def models(self):
        return [names["model"] for names in self.names]

    def _run(self, line, kind, target):
        optimizers = [names.get(target) for names in self.names]
        made = [one for one in self.made if one.optimizers[0] in optimizers[:1]]
        for one in made if kind in ("step", "sync") else ():
            one.reduce()
        for one in made if kind == "step" else ():
            one.before_step()
        before = self._gradients()
        if kind == "join":
            self._join(line, target, made[0])
        else:
            self._on_every_replica(line)
        if kind in ("backward", "partial"):
            self._after_backward(before, reduces=kind == "backward")
        elif kind == "each":
            self._after_edit(before)
            if "autograd.grad(" in line and any(one.sums for one in self.made):
                self.may_refuse = self.unclear = "a sum makes room for what does not come"
        for one in made if kind in ("step", "raw") else ():
            one.after_step()
        for one in self.made if kind == "finish" else ():
            one.finish()

    def _on_every_replica(self, line):
        raised = []
        for names in self.names:
            try:
                exec(line, names)
            except Exception as error:
                raised.append(error)
        if 0 < len(raised) < self.size:
            raise RefusedToOneError from raised[0]
        if raised:
            raise raised[0]

    def _join(self, line, target, wrap):
        """Train on 2, 3, 2 batches; replicas without a batch add zeros and take the last model."""
        for k in range(3):
            active = [r for r in range(self.size) if k < 2 + r % 2]
            self.shared.clear()
            self.base.clear()
            for r, names in enumerate(self.names):
                names[target].zero_grad()
                if r in active:
                    exec(line, {**names, "k": k})
                elif wrap.is_weighted:
                    wrap.weights[r] = 0.0
            wrap.reduce()
            for r in active:
                self.names[r][target].step()
        for model in self.models():
            model.load_state_dict(self.names[1]["model"].state_dict())

    def _tuples(self):
        found = {}
        for one in self.made:
            for group in one.groups():
                found |= {ps[0]: (ps, one) for ps in group}
        return list(found.values())

    def _gradients(self):
        return {ps[0]: [(p.grad, kept(p.grad)) for p in ps] for ps, _ in self._tuples()}

    def _after_backward(self, before, *, reduces):
        touched = set()
        for ps, one in self._tuples():
            olds = before.get(ps[0], [(None, None)] * len(ps))
            if not any(changed(p, old) for p, old in zip(ps, olds, strict=True)):
                continue
            touched.add(ps[0])
            self.replaced.discard(ps[0])
            if ps[0] in self.shared:
                self.shared.discard(ps[0])
                if olds[0][0] is not None:
                    self.base[ps[0]] = dense(olds[0][1][1])
                    if one.sums and self.base[ps[0]].any():
                        self.may_refuse = "backward adds to a sum"
        if not reduces:
            return
        for one in self.made:
            firsts = {ps[0] for group in one.groups() for ps in group}
            if one.sums and firsts & touched and firsts & self.shared & self.replaced:
                self.may_refuse = "a sum was replaced, and backward goes on"
            if firsts & touched:
                one.pass_is_over()

    def _after_edit(self, before):
        for ps, one in self._tuples():
            olds = before.get(ps[0])
            edited = olds and any(changed(p, old) for p, old in zip(ps, olds, strict=True))
            if edited and one.done:
                self.may_refuse = "gradients were changed before the last pass"
            grads = [dense(p.grad) for p in ps]
            have = sum(g is not None for g in grads)
            if 0 < have < len(ps) and not ps[0].requires_grad:
                self.may_refuse = "frozen with a gradient on some ranks alone"
            if not any(g is not None and g.any() for g in grads):
                self.shared.discard(ps[0])
                self.base.pop(ps[0], None)
                continue
            if edited and olds[0][1] and place_of(ps[0].grad)[1] != olds[0][1][0][1]:
                self.replaced.add(ps[0])
            alike = all(g is not None and equal(g, grads[0]) for g in grads)
            if ps[0] in self.shared and not alike:
                self.shared.discard(ps[0])
                self.may_refuse = "gradients that differ were set by hand"
            elif ps[0] not in self.shared and edited and one.sums:
                self.may_refuse = self.unclear = "local gradients were edited, and then summed"


def equal(one, other):
    return one.shape == other.shape and one.allclose(other, 0.0, 0.0, equal_nan=True)


def changed(parameter, old):
    grad, copy = old
    if grad is None or parameter.grad is None:
        return parameter.grad is not grad
    return parameter.grad is not grad or place_of(parameter.grad) != copy[0]


class Stub:
    """Replace ``hvd`` on a replica: record the calls."""

    Average, Sum, Adasum = "average", "sum", "adasum"
    Compression = SimpleNamespace(none=0.0, fp16=1e-3, bf16=1e-2)

    def __init__(self, oracle, rank):
        self._oracle, self._rank = oracle, rank
        for kind in ("LocalSGD", "PostLocalSGD", "HierarchicalLocalSGD", "DiLoCo", "StagedSGD"):
            setattr(self, kind, lambda *a, kind=kind, **k: self._method(kind, *a, **k))

    def rank(self):
        return self._rank

    def size(self):
        return self._oracle.size

    def broadcast_parameters(self, *_, **__):
        """Do nothing, because replicas are equal when a script calls this method."""

    def _nth(self, make):
        """Return the object that all replicas make in this call."""
        oracle, own = self._oracle, self._oracle.makers[self._rank]
        own.append(None)
        if len(own) > len(oracle.made):
            oracle.made.append(make())
        return oracle.made[len(own) - 1]

    def DistributedOptimizer(self, optimizer, named=None, **options):  # noqa: N802, ARG002
        wrap = self._nth(lambda: Wrap(self._oracle, range(self._oracle.size), **options))
        wrap.take(self._rank, optimizer)
        optimizer.synchronize = lambda: None
        optimizer.skip_synchronize = nullcontext
        optimizer.set_num_samples = lambda n, nominal=1.0: wrap.weigh(self._rank, n / nominal)
        optimizer.set_backward_passes_per_step = wrap.set_passes
        for begins_anew in ("zero_grad", "load_state_dict"):
            plain = getattr(optimizer, begins_anew)
            beginning = lambda *a, plain=plain, **k: (wrap.set_passes(wrap.passes), plain(*a, **k))  # noqa: E731
            setattr(optimizer, begins_anew, beginning)
        return optimizer

    def _method(self, kind, model, optimizer, *args, **options):
        method = self._nth(lambda: Local(self._oracle, kind, *args, **options))
        method.take(self._rank, optimizer, model)
        return SimpleNamespace(
            set_num_samples=lambda n, nominal=1.0: method.weigh(self._rank, n, nominal),
            skip_step=lambda: method.skip(self._rank),
            finish=lambda: None,
            averaged=nullcontext,
        )
