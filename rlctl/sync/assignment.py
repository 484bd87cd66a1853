"""The assignment problem: one column for every row, the sum of the chosen values as large as can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def assign(values: npt.NDArray[np.float64]) -> list[int]:
    """Return for each row of (rows, columns), rows <= columns, its column.

    Kuhn's method by shortest augmenting paths with potentials (Jonker and Volgenant 1987), O(rows^2 x columns).
    """
    rows, columns = values.shape
    assert rows <= columns
    cost = values.max(initial=0.0) - values
    row_potential, column_potential = np.zeros(rows), np.zeros(columns)
    owner = np.full(columns, -1)
    for start in range(rows):
        distance = np.full(columns, np.inf)
        before = np.full(columns, -1)
        done = np.zeros(columns, dtype=bool)
        row, column, reached = start, -1, 0.0
        while True:
            through = reached + cost[row] - row_potential[row] - column_potential
            better = ~done & (through < distance)
            distance[better] = through[better]
            before[better] = column
            column = int(np.where(done, np.inf, distance).argmin())
            done[column] = True
            reached = float(distance[column])
            if owner[column] < 0:
                break
            row = int(owner[column])
        visited = done & (owner >= 0)
        row_potential[start] += reached
        row_potential[owner[visited]] += reached - distance[visited]
        column_potential[done] -= reached - distance[done]
        while column >= 0:
            previous = int(before[column])
            owner[column] = start if previous < 0 else owner[previous]
            column = previous
    result = [0] * rows
    for column, row in enumerate(owner):
        if row >= 0:
            result[row] = column
    return result
