"""Reduction operators, with Horovod's names."""

import enum


class ReduceOp(enum.Enum):
    """How the values of all ranks become one."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    __hash__ = object.__hash__  # Enum's own is a function in Python, in the way of every call


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
