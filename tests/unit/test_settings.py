from __future__ import annotations

import pickle

import pytest

from kernel_tools.errors import ConfigurationError
from kernel_tools.settings import Settings, find_project_dir, load_settings


def test_the_environment_wins_over_dotenv(tmp_path):
    (tmp_path / ".env").write_text("A=file\nB=file\n")
    settings = load_settings(tmp_path, environ={"A": "env"})
    assert (settings.get("A"), settings.get("B"), settings.get("C")) == ("env", "file", None)


def test_dotenv_is_found_in_scripts_and_where_a_variable_says(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/.env").write_text("A=scripts\n")
    assert load_settings(tmp_path, environ={}).get("A") == "scripts"
    (tmp_path / "named").write_text("A=named\n")
    assert (
        load_settings(tmp_path, environ={"KERNEL_TOOLS_ENV_FILE": str(tmp_path / "named")}).get("A")
        == "named"
    )


def test_a_named_env_file_that_is_absent_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="KERNEL_TOOLS_ENV_FILE"):
        load_settings(tmp_path, environ={"KERNEL_TOOLS_ENV_FILE": str(tmp_path / "absent")})


def test_settings_show_no_value(tmp_path):
    (tmp_path / ".env").write_text("A=canary-1\n")
    assert "canary" not in repr(load_settings(tmp_path, environ={"B": "canary-2"}))


def test_a_missing_secret_says_where_to_set_it(tmp_path):
    with pytest.raises(ConfigurationError, match="never in a cell"):
        load_settings(tmp_path, environ={}).require_secret("MINIO_SECRET_KEY")


def test_the_project_is_the_nearest_marked_folder_upwards(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    inner = tmp_path / "notebooks/deep"
    inner.mkdir(parents=True)
    assert find_project_dir(inner) == tmp_path.resolve()


def test_settings_are_not_pickled(tmp_path):
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Settings({"MINIO_SECRET_KEY": "canary-canary"}, {}, tmp_path))
