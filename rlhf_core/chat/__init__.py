"""Messages, chat templates and tokens: the only place that tokenises."""
