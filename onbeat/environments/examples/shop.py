"""A shop: its prices change with every task, so only a look into the list helps."""

import random
import re


class Shop:
    """A shop with a price list.

    The reward: 0.3 for a look at the right price, and 0.7 for an answer that names this price and no other number.
    """

    def reset(self, item: str, seed: int) -> None:
        """Begin with the item that the customer asks for."""
        self._item, self._price = item, random.Random(seed).randint(10, 99)
        self._has_looked = False

    def price(self, item: str) -> str:
        """Return the price of an item in euros.

        Args:
            item: what the customer wants to buy, for example "lamp"
        """
        if item.lower().strip() != self._item:
            raise ValueError(f"the shop has no {item}")
        self._has_looked = True
        return str(self._price)

    def get_reward(self, response: str) -> dict[str, float]:
        """Return the reward of what the customer was told in the end."""
        is_right = self._has_looked and re.findall(r"\d+", response) == [str(self._price)]
        return {"reward": 0.3 * self._has_looked + 0.7 * is_right, "looked": self._has_looked, "right": is_right}
