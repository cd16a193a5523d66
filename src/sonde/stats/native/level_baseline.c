/* For every processor. */
#include "summary.h"

#include "lanes_portable.h"

#define LEVEL baseline
#include "level.h"
