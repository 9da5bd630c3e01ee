"""Do the native files of these releases fit together: the link verdict, from wheels that are not installed."""
