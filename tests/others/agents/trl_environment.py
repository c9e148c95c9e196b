"""For `environment_factory` of GRPOTrainer: a shop, whose reward is what is left of the budget."""


class Shop:
    def __init__(self, price: int = 3):
        self.price = price

    def reset(self, budget: int, **kwargs) -> str | None:
        self.left = budget
        self.bought = []
        return f" you have {budget}"

    def buy(self, thing: str, count: int = 1) -> str:
        """
        Buy things.

        Args:
            thing: What to buy.
            count: How many.

        Returns:
            What is left of the budget.
        """
        cost = self.price * count
        if cost > self.left:
            raise ValueError("too dear")
        self.left -= cost
        self.bought += [thing] * count
        return f"left {self.left}"

    async def look(self) -> list[str]:
        """
        Look into the basket.

        Returns:
            The things in it.
        """
        return self.bought

    def get_reward(self) -> float:
        return float(self.left) if self.bought else 0.0


class NoReset:
    def buy(self) -> str:
        """Buys."""
        return ""


class NoDocstring:
    def reset(self, **kwargs):
        return None

    def buy(self, thing: str) -> str:
        return ""
