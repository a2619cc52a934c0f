"""What is known of strategies in each context: costs by tenant and kind of prompt, each shrunk towards the one above it.

a tenant's prompts of a kind  ->  everybody's prompts of that kind  ->  everybody's prompts
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from services.router.learning.compared_cost import APART, ComparedCost, Estimate, cost_of
from services.router.learning.contexts import ANY, Context

# Of tenants, the ones that have asked last.
MOST_TENANTS = 1024

# By kind of prompt and strategy.
Sheet = dict[str, dict[str, ComparedCost]]
# Of one answer, by strategy: what it would have taken, and what ``auto`` would have, in plain steps.
Costs = Mapping[str, tuple[float, float]]


class Counts:
    """Costs that one router has seen, bounded: beyond ``most_tenants`` the one that has not asked for longest is given up.

    Attributes:
        everybody: of all tenants together.
    """

    def __init__(self, most_tenants: int = MOST_TENANTS) -> None:
        self._most = most_tenants
        self._tenants: OrderedDict[str, Sheet] = OrderedDict()
        self.everybody: Sheet = {}

    def sheet(self, tenant: str) -> Sheet:
        """A tenant's own costs, to be read and written."""
        found = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)
        return found

    def learn(self, context: Context, costs: Costs) -> None:
        """Add an answer."""
        for sheet, kind in self._above(context):
            add_sheet(sheet, {kind: {name: cost_of(own, auto) for name, (own, auto) in costs.items()}})

    def estimate(self, context: Context, strategy: str) -> Estimate:
        """What a strategy costs in a context, as a share of what ``auto`` does; 1 before anything is known."""
        found = Estimate(1.0, 0.0)
        for sheet, kind in self._above(context):
            cost = sheet.get(kind, {}).get(strategy, _NOTHING)
            found = cost.estimate(Estimate(found.cost, math.hypot(found.error, APART)))
        return found

    def forget(self, tenant: str) -> None:
        """Delete a tenant's own costs."""
        self._tenants.pop(tenant, None)

    def put(self, tenant: str | None, sheet: Sheet | None) -> None:
        """Replace a tenant's costs, or everybody's (None). Without a sheet they are deleted."""
        if tenant is None:
            self.everybody = sheet or {}
        elif sheet is None:
            self.forget(tenant)
        else:
            self.sheet(tenant).clear()
            self.sheet(tenant).update(sheet)

    def of(self, tenant: str | None) -> Sheet:
        """A tenant's costs, or everybody's (None); empty: there are none."""
        return self.everybody if tenant is None else self._tenants.get(tenant, {})

    def _above(self, context: Context) -> tuple[tuple[Sheet, str], ...]:
        """Where a context's answers are counted, from the widest to its own."""
        return (self.everybody, ANY), (self.everybody, context.kind), (self.sheet(context.tenant), context.kind)


# Never added to.
_NOTHING = ComparedCost()


def add_sheet(sheet: Sheet, more: Sheet) -> Sheet:
    """Add the costs of ``more`` to a sheet, whose old ones fade for them; the sheet."""
    for kind, costs in more.items():
        for strategy, cost in costs.items():
            sheet.setdefault(kind, {}).setdefault(strategy, ComparedCost()).add_cost(cost)
    return sheet
