from tests.fakes.shell import shell  # noqa: F401 - a fixture
