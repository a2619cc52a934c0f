/* What a test run calls before the library is loaded. */
int outrider_check(void) { return 1; }
