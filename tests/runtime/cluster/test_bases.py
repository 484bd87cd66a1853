"""Who is sent a base with an adapter."""

from rlctl.runtime.cluster.bases import Bases


def test_the_base_goes_along_for_those_that_lack_it_alone():
    said: list[bool] = []
    bases = Bases(said.append)
    bases.before(["a", "b"], set())
    bases.after(["a", "b"], [])
    bases.before(["a", "b"], set())
    bases.after(["a"], ["b"])  # what it holds is not known
    bases.before(["a"], set())
    bases.after(["a"], [])
    bases.before(["a", "b"], set())
    bases.after(["a", "b"], [])
    bases.before(["b"], ["a"])
    bases.after(["b"], [])
    bases.before(["a", "b"], set())
    assert said == [True, False, True, False, True]
