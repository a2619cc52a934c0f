"""Files in the working directory that Python would import instead of a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks.working_directory import check_working_directory
from speculation.errors import ConfigurationError


@pytest.mark.examples(5)
@pytest.mark.parametrize("name", ["requests.py", "numpy/__init__.py", "random.py", "grpc.py", "yaml.py"])
def test_the_name_of_a_library_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigurationError, match="another folder") as raised:
        check_working_directory(tmp_path)
    assert Path(name).parts[0] in str(raised.value) and "\n" not in str(raised.value)


def test_other_names_are_no_matter(tmp_path: Path) -> None:
    for name in ("mine.py", "utils.py", "pytest.py", "numpy.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "requests").mkdir()
    check_working_directory(tmp_path)


def test_our_own_folder_is_fine() -> None:
    check_working_directory(Path(__file__).parents[3])
