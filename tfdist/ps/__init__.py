"""Parameters on ps tasks: who holds what, how workers pull and push, and the tasks' lives."""
