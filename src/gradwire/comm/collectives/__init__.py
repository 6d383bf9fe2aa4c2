"""Collective communication of gradients: layouts, the meter, the algorithms and the reducer."""

from gradwire.comm.collectives.islands import IslandReducer, Islands, build_islands
from gradwire.comm.collectives.layout import Layout, Shard
from gradwire.comm.collectives.meter import METER, Meter
from gradwire.comm.collectives.reducer import Reducer
from gradwire.comm.reduction import Exempt

__all__ = ["METER", "Exempt", "IslandReducer", "Islands", "Layout", "Meter", "Reducer", "Shard", "build_islands"]
