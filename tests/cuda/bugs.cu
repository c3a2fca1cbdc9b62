#include "../../cuda/words.h"
