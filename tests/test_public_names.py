"""What users import from mpbroker itself."""

import subprocess
import sys
from importlib import import_module

import pytest

import mpbroker
from mpbroker import extensions

IMPORTED = "import sys, mpbroker; print(*[m for m in sys.modules if 'mpbroker' in m])"


@pytest.mark.parametrize("home", mpbroker._HOMES)
def test_the_names_of_a_module_are_those_that_type_checkers_see(home):
    """They see what the star import brings, which is `__all__`."""
    names = mpbroker._HOMES[home].split()
    assert sorted(import_module(home).__all__) == sorted(names)


@pytest.mark.parametrize("name", mpbroker.__all__)
def test_every_public_name_can_be_imported_and_is_listed(name):
    assert getattr(mpbroker, name) is not None
    assert name in dir(mpbroker)


def test_no_two_modules_have_a_name_for_different_things():
    names = [name for names in mpbroker._HOMES.values() for name in names.split()]
    assert len(names) == len(set(names))


def test_a_name_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(AttributeError, match="'mpbroker' has no attribute 'Produce'"):
        _ = mpbroker.Produce


def test_importing_mpbroker_imports_nothing_else_of_it():
    """Every process of a broker does that."""
    command = [sys.executable, "-c", IMPORTED]
    assert subprocess.check_output(command, text=True).split() == ["mpbroker"]


@pytest.mark.parametrize("name", extensions.__all__)
def test_every_name_for_plug_ins_is_there(name):
    assert getattr(extensions, name) is not None
