"""Servers of this process."""

from ..app_server import serve_app  # noqa: F401 - a fixture
