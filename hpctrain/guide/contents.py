"""Order and categories of the guides, for ``hpctrain guide`` and for the HTML manual."""

KINDS = {
    "Tutorials": ("start", "cluster"),
    "How-to guides": (
        *("ddp", "migrate", "torch-distributed", "horovod", "train", "data", "checkpoints"),
        *("slurm", "recover", "gpu", "parallel", "parallel-script", "sharded", "embeddings"),
        *("compression", "local-sgd", "federated", "async-sgd", "large-batch"),
        *("plan", "cost", "studies", "results", "performance", "hangs"),
    ),
    "Reference": (
        *("api", "commands", "keys", "settings", "errors", "horovod-names", "horovod-variables"),
        *("versions", "glossary"),
    ),
    "Explanation": ("step", "scale", "architecture", "consistency", "tour"),
}
"""Topics by category, in reading order; ``api``, ``commands`` and ``keys`` are generated."""
