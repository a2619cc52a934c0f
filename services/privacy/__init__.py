"""Private answers: who watches the connection learns nothing but their length."""
