"""Collective communication of gradients: layouts, the meter, the algorithms and the reducer."""

from gradwire.collectives.islands import IslandReducer, Islands, build_islands
from gradwire.collectives.layout import Layout, Piece
from gradwire.collectives.meter import METER, Meter
from gradwire.collectives.reducer import Reducer
from gradwire.compressors.exempt import Exempt

__all__ = ["METER", "Exempt", "IslandReducer", "Islands", "Layout", "Meter", "Piece", "Reducer", "build_islands"]
