"""A shop: its prices change with every task, so only a look into the list helps."""

import random
import re


class Shop:
    """A shop with a price list, and a customer who asks what some items cost together.

    The reward: 0.5 for looking up the prices, in equal parts, and 0.5 for an answer whose last number is their sum.
    """

    def reset(self, answer: list[str], seed: int) -> None:
        """Begin with the items that the customer asks for, and new prices."""
        drawn = random.Random(seed)
        self._prices = {item: drawn.randint(1, 9) for item in answer}
        self._seen: set[str] = set()

    def price(self, item: str) -> int:
        """Return the price of an item in euros.

        Args:
            item: one thing that the customer wants to buy, for example "lamp"
        """
        if item not in self._prices:
            raise ValueError(f"the shop has no {item}")
        self._seen.add(item)
        return self._prices[item]

    def get_reward(self, response: str) -> dict[str, float]:
        """Return the reward of what the customer was told in the end."""
        looked = len(self._seen) / len(self._prices)
        is_right = looked == 1.0 and re.findall(r"\d+", response)[-1:] == [str(sum(self._prices.values()))]
        return {"reward": 0.5 * looked + 0.5 * is_right, "looked": looked, "right": is_right}
