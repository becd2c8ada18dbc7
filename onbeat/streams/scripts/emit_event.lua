-- ARGV: kind, message, data (JSON object). An event that belongs to no state change.
emit(ARGV[1], ARGV[2], cjson.decode(ARGV[3]))
return 1
