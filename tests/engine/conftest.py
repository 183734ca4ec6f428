from engine_fixtures import engine

__all__ = ["engine"]
