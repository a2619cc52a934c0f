"""What is checked before anything is fetched, loaded or started; ``outrider plan`` prints it."""
