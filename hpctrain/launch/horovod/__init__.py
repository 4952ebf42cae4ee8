"""Horovod itself: built from its sdist against the torch and the MPI of this environment.

``build`` does it; ``tools`` looks at the machine, ``missing`` judges it, ``sdist`` holds what is
known of the published sources, ``compiling`` runs the compiler, ``cache`` keeps the wheels and
``installed`` says what is there.
"""
