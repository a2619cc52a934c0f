"""Every rendering of the chart."""

from __future__ import annotations

import pytest

from tests.k8s.chart import Manifest, render
from tests.k8s.test_chart_valid import CASES


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)
