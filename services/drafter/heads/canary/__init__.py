"""The canary: before a head serves, it must do what it was trained for, on text that the target wrote itself."""
