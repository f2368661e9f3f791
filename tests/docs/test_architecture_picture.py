"""The architecture picture matches the code's imports: it has no cycles and no arrows up, and it is current."""

import importlib.util
from graphlib import CycleError
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def picture():
    spec = importlib.util.spec_from_file_location("architecture_picture", DOCS / "architecture_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house(picture):
    return picture.rooms(picture.PACKAGE)


@pytest.mark.thorough
def test_all_package_dependencies_point_down(picture, house):
    level, arrows = picture.floors(house), picture.arrows(house)
    assert {"core", "engines", "rounds", "server", "tracing", "trainer"} <= house.keys()
    assert all(level[upper] > level[lower] for upper, lower in arrows)
    assert all(level[room] > level[below] for room in house for below in house[room])


def test_transitive_arrows_are_omitted(picture):
    house = {"loop": {"engines", "core"}, "engines": {"core"}, "core": set(), "tracing": set()}
    assert picture.floors(house) == {"core": 0, "tracing": 0, "engines": 1, "loop": 2}
    assert picture.arrows(house) == [("engines", "core"), ("loop", "engines")]
    with pytest.raises(CycleError):
        picture.floors(house | {"core": {"loop"}})


def test_imports_are_read_from_the_code(picture, tmp_path):
    package = tmp_path / "lightning_fed"
    (package / "core").mkdir(parents=True)
    (package / "core" / "types.py").write_text("import torch\n")
    (package / "_compat.py").write_text("from lightning_fed.core import types\n")
    (package / "data.py").write_text("import lightning_fed.core.types\nfrom lightning_fed._compat import types\n")
    (package / "loop.py").write_text("def f():\n    from lightning_fed import data\n    import lightning_feder.core\n")
    assert picture.rooms(package) == {"core": set(), "data": {"core"}, "loop": {"data"}}


@pytest.mark.thorough
def test_picture_is_up_to_date_with_the_imports(picture, house):
    drawn = picture.draw(house)
    assert (DOCS / "images" / "architecture.svg").read_text() == drawn, "run python docs/architecture_picture.py"
