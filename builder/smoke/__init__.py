"""The smoke test that runs inside an image; standard library only."""
