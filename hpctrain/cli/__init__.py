"""The command ``hpctrain``: one module for each command, with its options and its help.

``main`` loads the module of a command when the command or its help is asked for. Modules that it
imports by ``from PACKAGE import MODULE`` are executed at their first use: no help loads torch.
"""
