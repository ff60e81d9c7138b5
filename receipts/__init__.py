"""The receipt that the shop owes for an order: the mail, the task that sends it, its progress."""
