"""The command ``hpctrain``: one module for each command, with its options and its help.

``main`` loads the module of a command when the command or its help is requested. A module of a
command delays the execution of modules that it imports by ``from PACKAGE import MODULE``, so that
a help text does not load torch.
"""
