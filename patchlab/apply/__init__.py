"""Make it happen, and put it back: the engine, the scope, and the registries a scope must keep."""
