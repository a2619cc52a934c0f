"""What several processes say in Prometheus's text format, added up, such as what Ray's agents on all nodes export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.metrics.families import FAMILIES, PREFIX, Family

_RAY = "ray_"
# The ending of a gauge that is a share of something: of several, the mean counts.
_SHARE = "_ratio"
Labels = tuple[tuple[str, str], ...]
# Of a series: its ending, such as "_bucket", and its labels.
_Series = tuple[str, Labels]


def added_up(texts: Iterable[str]) -> Iterator[Metric]:
    """One family of each name, with our own labels alone; what is not ours is left out.

    Raises:
        ValueError: a text is not of that format.
    """
    found: dict[str, dict[_Series, list[float]]] = {}
    for text in texts:
        for family, name, labels, value in own_samples(text):
            of_family = found.setdefault(family.name, {})
            of_family.setdefault((name.removeprefix(_base(family)), labels), []).append(value)
    for name, series in found.items():
        yield _family(FAMILIES[name], series)


def own_samples(text: str) -> Iterator[tuple[Family, str, Labels, float]]:
    """The samples of our own families: the family, the sample's name without a prefix, our own labels, and its value.

    Raises:
        ValueError: the text is not of Prometheus's format.
    """
    for family in text_string_to_metric_families(text):
        ours = family.name.removeprefix(_RAY)
        bare = ours.removeprefix(PREFIX)
        # Counters lose their ending in the family's name, and have it in the samples'.
        known = FAMILIES.get(bare) or FAMILIES.get(f"{bare}_total")
        if known is None or bare == ours:
            continue
        for sample in family.samples:
            labels = tuple((name, sample.labels[name]) for name in (*known.labels, "le") if name in sample.labels)
            yield known, sample.name.removeprefix(_RAY).removeprefix(PREFIX), labels, sample.value


def _base(family: Family) -> str:
    return family.name.removesuffix("_total") if family.kind == "counter" else family.name


def _family(family: Family, series: dict[_Series, list[float]]) -> Metric:
    told = Metric(PREFIX + _base(family), family.help, family.kind)
    for (ending, labels), values in series.items():
        value = sum(values) / (len(values) if family.name.endswith(_SHARE) else 1)
        told.add_sample(told.name + ending, dict(labels), value)
    return told
